"""Reads a user from a sentence with instructor, over /v1/responses. Prints it as JSON."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class User(BaseModel):
    name: str
    age: int


client = instructor.from_openai(
    OpenAI(base_url=sys.argv[1], api_key="none"), mode=instructor.Mode.RESPONSES_TOOLS
)
user = client.responses.create(
    model=sys.argv[2],
    input="Ada is 36 years old.",
    response_model=User,
    max_retries=0,
)
print(user.model_dump_json())
