"""Semantic Kernel: a function that the model calls by itself. Prints the answer."""

import asyncio
import sys

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

calls: list[str] = []


class Thermometer:
    @kernel_function(description="Measure the temperature of a city.")
    def measure(self, city: str) -> str:
        calls.append(city)
        return "it has 21 degrees"


async def main() -> None:
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    service = OpenAIChatCompletion(ai_model_id=sys.argv[2], async_client=client)
    kernel = Kernel()
    kernel.add_service(service)
    kernel.add_plugin(Thermometer(), plugin_name="thermometer")
    history = ChatHistory()
    history.add_developer_message("Measure before you answer.")
    history.add_user_message("How warm is it in Oslo?")
    settings = OpenAIChatPromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto()
    )
    answer = await service.get_chat_message_content(history, settings, kernel=kernel)
    assert calls == ["Oslo"], calls
    print(answer)


asyncio.run(main())
