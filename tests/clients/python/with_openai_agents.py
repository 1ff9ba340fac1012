"""An agent of openai-agents with a tool and an output type. Prints what it ends with as JSON."""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

MODELS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
url, name, api = sys.argv[1:]
calls: list[str] = []


class Weather(BaseModel):
    city: str
    degrees: int


@function_tool
def measure(city: str) -> str:
    """Measure the temperature of a city."""
    calls.append(city)
    return "it has 21 degrees"


async def main() -> None:
    set_tracing_disabled(disabled=True)
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    agent = Agent(
        name="meteorologist",
        instructions="Measure before you answer.",
        model=MODELS[api](model=name, openai_client=client),
        tools=[measure],
        output_type=Weather,
    )
    streamed = Runner.run_streamed(agent, "How warm is it in Oslo?", max_turns=4)
    async for _ in streamed.stream_events():
        pass
    whole = await Runner.run(agent, "How warm is it in Oslo?", max_turns=4)
    assert streamed.final_output == whole.final_output
    assert calls == ["Oslo", "Oslo"], calls
    print(whole.final_output.model_dump_json())


asyncio.run(main())
