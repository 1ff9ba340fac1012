"""Logit processors as bodies name them: SGLang's two fields, without its code.

There `custom_logit_processor` carries a class, and the server runs it. Here it is the name of one
that is registered (`antiphon.wire.processors`), and `custom_params` are its parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.fields import decode
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.processors import REGISTERED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.wire.processors import LogitProcessor

NAME = "custom_logit_processor"


def processor_of(
    name: str | None, given: Mapping[str, msgspec.Raw] | None, *, field: str
) -> tuple[LogitProcessor, ...]:
    """Return the processor of a name, if one is named.

    Args:
        name: What the client said.
        given: Its parameters.
        field: What the client calls those.

    Raises:
        Unsupported: None has this name.
        InvalidRequest: The parameters are not its own, or there is none that they could be of.
    """
    if not name:
        if given:
            raise InvalidRequest(f"{field}: they are of a {NAME}, and none is named", param=field)
        return ()
    kind = REGISTERED.get(name)
    if kind is None:
        known = ", ".join(REGISTERED)
        text = f"{NAME}: code that comes with a request is never run; name one of {known}"
        raise Unsupported(text, param=NAME)
    return (_with(kind, given or {}, field),)


def _with(
    kind: type[LogitProcessor], given: Mapping[str, msgspec.Raw], field: str
) -> LogitProcessor:
    if strange := given.keys() - set(kind.__struct_fields__):
        known = ", ".join(kind.__struct_fields__)
        text = f"{field}: it has no {min(strange)}, only {known}"
        raise InvalidRequest(text, param=f"{field}.{min(strange)}")
    return decode(msgspec.json.encode(given), kind, field)
