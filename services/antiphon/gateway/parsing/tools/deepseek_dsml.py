"""DeepSeek V3.2, V4 and V4.1: invocations whose parameters declare whether they are strings."""

# ruff: noqa: RUF001  # these bars are the letters of the marks

from __future__ import annotations

from antiphon.gateway.parsing.tools.format import CallGrammar, ToolFormat, framed
from antiphon.gateway.parsing.tools.tags import Tags, tagged


def _format(name: str, section: str, space: str = "") -> ToolFormat:
    """The format of a model; `space` precedes the name of each element."""
    begin, end = f"<｜DSML｜{space}{section}>", f"</｜DSML｜{space}{section}>"
    tags = Tags(
        call=(f'<｜DSML｜{space}invoke name="', '">'),
        call_end=f"</｜DSML｜{space}invoke>",
        argument_begin=f'<｜DSML｜{space}parameter name="',
        argument=(('" string="true">', True), ('" string="false">', False)),
        argument_end=f"</｜DSML｜{space}parameter>",
        end=end,
        lines=False,
    )
    return ToolFormat(
        names=(name,),
        example=(
            f'{begin}\n<｜DSML｜{space}invoke name="f">\n'
            f'<｜DSML｜{space}parameter name="a" string="false">1</｜DSML｜{space}parameter>\n'
            f"</｜DSML｜{space}invoke>\n{end}"
        ),
        read=framed(begin, end, tagged(tags)),
        marks=(begin,),
        special=True,
        form=CallGrammar(
            trigger=begin,
            begin=f'{begin}\n<｜DSML｜{space}invoke name="',
            middle='">\n',
            end=f"</｜DSML｜{space}invoke>\n{end}",
            separator="\n",
            style="deepseek_v4_1_xml" if space else "deepseek_xml",
            marks=(begin, end, "｜DSML｜"),
        ),
    )


V32 = _format("deepseekv32", "function_calls")
V4 = _format("deepseekv4", "tool_calls")
V41 = _format("deepseekv41", "calls", space=" ")
