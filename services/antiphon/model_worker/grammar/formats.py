"""String formats that need exact patterns.

With its built-in formats the compiler accepts the 31st of February, seconds that no clock library
parses, and addresses with leading zeros, which some programs read as octal.
"""

from __future__ import annotations

_SHORT_OF_400 = "0[48]|[2468][048]|[13579][26]"
_LEAP_YEAR = f"[0-9]{{2}}({_SHORT_OF_400})|({_SHORT_OF_400})00"
_YEAR = "000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3}"
_DAY = (
    "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8])"
)
_DATE = f"(({_YEAR})-({_DAY})|({_LEAP_YEAR})-02-29)"
_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTE}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_MINUTE})"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"

FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^({_OCTET}\.){{3}}{_OCTET}$",
}
"""Each is narrower than RFC 3339 and RFC 3986, section 3.2.2, only in leap seconds, the year
0 and small fractions."""
