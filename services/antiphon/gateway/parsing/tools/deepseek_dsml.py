"""DeepSeek V3.2 and V4: invocations whose parameters say whether they are strings."""

# ruff: noqa: RUF001  # these bars are the letters of the marks

from __future__ import annotations

from antiphon.gateway.parsing.tools.format import ToolFormat, framed
from antiphon.gateway.parsing.tools.tags import Tags, tagged


def _format(name: str, section: str) -> ToolFormat:
    begin, end = f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"
    tags = Tags(
        call=('<｜DSML｜invoke name="', '">'),
        call_end="</｜DSML｜invoke>",
        argument_begin='<｜DSML｜parameter name="',
        argument=(('" string="true">', True), ('" string="false">', False)),
        argument_end="</｜DSML｜parameter>",
        end=end,
        lines=False,
    )
    return ToolFormat(
        names=(name,),
        example=(
            f'{begin}\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">1'
            f"</｜DSML｜parameter>\n</｜DSML｜invoke>\n{end}"
        ),
        read=framed(begin, end, tagged(tags)),
        marks=(begin,),
        special=True,
    )


V32 = _format("deepseekv32", "function_calls")
V4 = _format("deepseekv4", "tool_calls")
