"""Logits processors requested by bodies, in SGLang's two fields but without its code.

SGLang's `custom_logit_processor` carries a class that the server runs. Here it is the name of a
registered processor (`antiphon.wire.processors`), and `custom_params` are its parameters.
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
    """Return the named processor, if there is one.

    Args:
        name: Name from the body.
        given: Its parameters.
        field: The API's name of the parameters field.

    Raises:
        Unsupported: No processor has this name.
        InvalidRequest: The parameters are wrong, or no processor is named.
    """
    if not name:
        if given:
            raise InvalidRequest(f"{field}: requires {NAME}", param=field)
        return ()
    kind = REGISTERED.get(name)
    if kind is None:
        known = ", ".join(REGISTERED)
        text = (
            f"{NAME}: code in requests is never run; use the name of a registered processor: "
            f"{known}"
        )
        raise Unsupported(text, param=NAME)
    return (_with(kind, given or {}, field),)


def _with(
    kind: type[LogitProcessor], given: Mapping[str, msgspec.Raw], field: str
) -> LogitProcessor:
    if strange := given.keys() - set(kind.__struct_fields__):
        known = ", ".join(kind.__struct_fields__)
        text = f"{field}: unknown parameter {min(strange)}; allowed are {known}"
        raise InvalidRequest(text, param=f"{field}.{min(strange)}")
    return decode(msgspec.json.encode(given), kind, field)
