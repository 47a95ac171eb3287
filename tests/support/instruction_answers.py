"""Responses that follow the instructions of drawn prompts: an oracle that the checkers share nothing with."""

import json
from typing import Any

SENTENCE = "the old cat sat by the warm stove and slept until noon."


def answer(task: dict[str, Any]) -> str:
    asked = dict(zip(task["instruction_id_list"], task["kwargs"], strict=True))

    def wanted(name: str) -> dict[str, Any] | None:
        return next((kwargs for each, kwargs in asked.items() if each.endswith(name)), None)

    body = [SENTENCE] * 2
    if (length := wanted("number_words")) and length["relation"] == "at least":
        body = [SENTENCE] * (length["num_words"] // 10 + 1)
    if sentences := wanted("number_sentences"):
        body = [SENTENCE] * sentences["num_sentences"]
    text = " ".join([*body, *_content(wanted)])
    if wanted("json_format") is not None:
        return json.dumps({"text": text})
    text = _arranged(text, wanted)
    if wanted("title") is not None:
        text = f"<<a title>>\n{text}"
    if first := wanted("first_word_answer"):
        text = f"{first['first_word']} {text}"
    if postscript := wanted("postscript"):
        text += f"\n{postscript['postscript_marker']}{'.' if postscript['postscript_marker'][-1] != '.' else ''} bye"
    if end := wanted("end_checker"):
        text += f" {end['end_phrase']}"
    if wanted("quotation") is not None:
        text = f'"{text}"'
    if wanted("english_capital") is not None:
        text = text.upper()
    if wanted("english_lowercase") is not None:
        text = text.lower()
    return text


def _content(wanted: Any) -> list[str]:
    words: list[str] = []
    words += (wanted("existence") or {}).get("keywords", [])
    if often := wanted("keywords:frequency"):
        words += [often["keyword"]] * often["frequency"]
    if once := wanted("word_once"):
        words.append(once["keyword"])
    if letters := wanted("letter_frequency"):
        words.append(letters["letter"] * letters["let_frequency"])
    if placeholders := wanted("placeholders"):
        words += ["[name]"] * placeholders["num_placeholders"]
    if highlights := wanted("highlighted_sections"):
        words += ["*so*"] * highlights["num_highlights"]
    if capitals := wanted("capital_word_frequency"):
        words += ["LOUD"] * capitals["capital_frequency"]
    return words


def _arranged(text: str, wanted: Any) -> str:
    if paragraphs := wanted("number_paragraphs"):
        text += "\n***\nmore" * (paragraphs["num_paragraphs"] - 1)
    if nth := wanted("nth_paragraph_first_word"):
        parts = [text, *["more"] * (nth["num_paragraphs"] - 1)]
        place = nth["nth_paragraph"] - 1
        parts[place] = f"{nth['first_word']} {parts[place]}"
        text = "\n\n".join(parts)
    if bullets := wanted("bullet_lists"):
        text += "\n* point" * bullets["num_bullets"]
    if sections := wanted("multiple_sections"):
        heads = [
            f"{sections['section_spliter']} {number + 1}\n" for number in range(sections["num_sections"])
        ]
        text = "more\n".join(heads) + text
    return text
