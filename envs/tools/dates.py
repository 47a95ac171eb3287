"""Tools for dates of the Gregorian calendar."""

import re
from datetime import date, timedelta

from rollgym.envs.tools.tool import Tool, ToolError, tool_parameters

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_FORM = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_DATE = {"type": "string", "description": "A date as YYYY-MM-DD"}


def _parsed(text: str) -> date:
    try:
        # Python reads more forms than one; a policy is to learn one.
        if _FORM.fullmatch(text) is None:
            raise ValueError(text)
        return date.fromisoformat(text)
    except ValueError:
        raise ToolError(f"{text[:40]!r} is no date such as 2031-03-14") from None


def _add(date: str, days: int) -> str:
    try:
        return (_parsed(date) + timedelta(days=int(days))).isoformat()
    except OverflowError:
        raise ToolError("the date is out of the years 1 to 9999") from None


def _difference(start: str, end: str) -> str:
    return str((_parsed(end) - _parsed(start)).days)


def _weekday(date: str) -> str:
    return WEEKDAYS[_parsed(date).weekday()]


DATE_TOOLS = (
    Tool(
        "date_add",
        "Return the date some days after another one, or before it where days is negative.",
        tool_parameters(["date", "days"], date=_DATE, days={"type": "integer"}),
        _add,
    ),
    Tool(
        "date_difference",
        "Return the number of days from one date to another.",
        tool_parameters(["start", "end"], start=_DATE, end=_DATE),
        _difference,
    ),
    Tool("weekday", "Return the day of the week of a date.", tool_parameters(["date"], date=_DATE), _weekday),
)
