"""Dates as people write them."""

import datetime
import re

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_NAME = r"(?P<month>jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>\d{4})"
_WEEKDAY = r"(?:(?:mon|tues?|wednes|wed|thurs?|fri|satur|sat|sun)(?:day)?,?\s+)?(?:the\s+)?"
_FORMS = tuple(
    re.compile(_WEEKDAY + form, re.IGNORECASE)
    for form in (
        rf"{_YEAR}[-/.](?P<number>\d{{1,2}})[-/.]{_DAY}(?:t00:00:00(?:\.0+)?z?)?",
        rf"{_NAME}\s+{_DAY},?\s+{_YEAR}",
        rf"{_DAY}\s+(?:of\s+)?{_NAME},?\s+{_YEAR}",
        rf"{_YEAR},?\s+{_NAME}\s+{_DAY}",
        rf"{_DAY}\.\s?(?P<number>\d{{1,2}})\.\s?{_YEAR}",
    )
)
_SLASHES = re.compile(rf"(\d{{1,2}})[/-](\d{{1,2}})[/-]{_YEAR}")
_MONTHS_IN_A_YEAR = 12


def read_date(text: str) -> datetime.date | None:
    """Return the day that a text names; None where it names none, or could name two ("03/04/2024")."""
    plain = " ".join(text.split()).strip(" .")
    for form in _FORMS:
        match = form.fullmatch(plain)
        if match is not None:
            groups = match.groupdict()
            name = groups.get("month")
            month = _MONTHS.index(name.lower()) + 1 if name else int(groups["number"])
            return _date(int(groups["year"]), month, int(groups["day"]))
    match = _SLASHES.fullmatch(plain)
    if match is None:
        return None
    first, second, year = int(match[1]), int(match[2]), int(match["year"])
    if first == second or second > _MONTHS_IN_A_YEAR:
        return _date(year, first, second)
    return _date(year, second, first) if first > _MONTHS_IN_A_YEAR else None


def _date(year: int, month: int, day: int) -> datetime.date | None:
    try:
        return datetime.date(year, month, day)
    except ValueError:
        return None
