"""The tagger that stood in for WebShop's own when it was recorded."""

import re

_TOKEN = re.compile(r"[A-Za-z]+|[0-9]+|[^\sA-Za-z0-9]")
_NO_NOUN_LIST = """
a an the of for with and or in on to by from at is are it its this that your our my we i you me find looking
want need
"""
_NO_NOUNS = frozenset(_NO_NOUN_LIST.split())


def stub_nouns(title: str) -> list[str]:
    """The tagger that stood in for the original's when it was recorded."""
    words = (token.lower() for token in _TOKEN.findall(title) if token.isalpha())
    return [word for word in words if word not in _NO_NOUNS]
