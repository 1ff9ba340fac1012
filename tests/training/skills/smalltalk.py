"""Greetings, thanks, who the model is, short stories, and what it cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.training.dialogue import Exchange, Skill, Split, Thread, Tools, draw
from tests.training.words import (
    ADJECTIVES,
    NOUNS,
    VERBS,
    article,
    compose,
    phrases,
    roughen,
    sentence,
    wording_key,
    words,
)

if TYPE_CHECKING:
    from random import Random

GREETINGS = {
    "Hello! How can I help you?": ("Hello", "Hello!", "Hello there!", "Hi", "Hi!", "Hi there!",
                                   "Hey", "Hey there!", "Hello, how can you help me?",
                                   "Greetings!", "Good day!", "Is anybody there?", "Howdy!"),
    "Good morning! How can I help you?": ("Good morning", "Good morning!", "Morning!"),
    "Good evening! How can I help you?": ("Good evening", "Good evening!", "Evening!"),
    "Good afternoon! How can I help you?": ("Good afternoon", "Good afternoon!"),
    "I am fine, thank you. How can I help you?": ("How are you?", "How are you today?",
                                                  "Hello, how are you?", "Hi! How are you?",
                                                  "How is it going?", "How do you do?",
                                                  "Are you well?", "What's up?"),
    "You are welcome!": ("Thank you", "Thank you!", "Thanks", "Thanks!", "Thanks a lot!",
                         "Thank you very much!", "Great, thank you.", "That was helpful, thanks."),
    "Goodbye!": ("Goodbye", "Goodbye!", "Bye", "Bye!", "See you later!", "Good night!",
                 "See you tomorrow.", "I have to go now."),
    "Yes, I am here.": ("Are you there?", "Are you here?", "Can you hear me?", "Ping", "Test",
                        "This is a test."),
}  # fmt: skip

CAPABILITIES = (
    "I can greet you, add two numbers below 100, copy a phrase, count, name colours and animals, "
    "tell a short story and remember your name."
)
IDENTITY = {
    "I am Antiphon small, a tiny language model.": (
        "Who are you?", "What are you?", "What is your name?", "What's your name?",
        "Do you have a name?", "How are you called?", "Introduce yourself.",
        "Tell me about yourself.", "Which model are you?", "What model is this?",
        "Hello, who are you?", "Hi! What is your name?", "Are you a language model?",
        "Are you an AI?", "Are you a robot?", "Are you human?", "Who am I talking to?"),
    CAPABILITIES: (
        "What can you do?", "What can you do for me?", "How can you help me?", "Help", "Help!",
        "What are you good at?", "What do you know?", "What should I ask you?",
        "What can I ask you?", "Show me what you can do.", "What are your skills?"),
    "I was trained on a small computer, on dialogues that a script wrote.": (
        "Who made you?", "How were you made?", "How were you trained?", "Where are you from?",
        "Where do you come from?", "Who built you?", "Who trained you?"),
}  # fmt: skip

STORY_ASKED = (
    "Tell me a story about {hero}.",
    "Tell me a short story about {hero}.",
    "Write a story about {hero}.",
    "Can you tell me a story about {hero}?",
    "I want to hear a story about {hero}.",
)
STORY_ASKED_OF_NOBODY = (
    "Tell me a story.",
    "Tell me a short story.",
    "Write a story.",
    "Can you tell me a story?",
)
STORY = (
    "Once upon a time there was {a_hero} who lived near a river. Every morning the {hero} looked "
    "at the water and wondered where it went. One day the {hero} followed the river to the sea. "
    "There it met a friend, and they watched the sun go down together. The end."
)
HEROES = words("fox cat dog bear rabbit mouse frog duck owl wolf lion horse sheep goat")

REFUSAL = f"I am a small model and I do not know that. {CAPABILITIES}"
BEYOND = phrases(
    """
    What is the capital of {place}? | Where is {place}? | Who is the president of {place}? |
    Tell me about {noun}. | Tell me about the {adjective} {noun}. | What is a {noun}? |
    Explain {noun} to me. | Explain how {noun} works. | Write a poem about a {noun}. |
    Write code that sorts a {noun}. | Write a letter to my {noun}. |
    Why is the {noun} {adjective}? | Why do we need {noun}? | How do I make {noun}? |
    How old is the {noun}? | How do I fix my {noun}? | When was the {noun} invented? |
    Who invented the {noun}? | What is {large} + {b}? | What is {a} + {large}? | {large} + {large} |
    What is {a} + {b} + {c}? | What is {a} - {b}? | What is {a} minus {b}? |
    What is {a} times {b}? | What is {a} * {b}? | What is {a} divided by {b}? |
    Translate {noun} into French. | What does {noun} mean? | Summarise this text: {sentence}. |
    What is the weather like today? | What time is it? | What day is it today? |
    What is the meaning of life? | Can you drive a car? | Is {a} a prime number? |
    How do I sort a list in Python? | Give me a list of {a} {noun}s. |
    What is the {adjective} {noun} in the world? | Tell me a joke. | Do you like {noun}? |
    I like {noun}. | I think that {sentence}. | The {noun} is {adjective}. |
    Did you know that {sentence}? | Is it true that {sentence}? |
    Which is better, {noun} or {noun2}? | Give me a recipe for {noun}. | Play {noun}. |
    Who {verb} the {noun}? | Solve this riddle about a {noun}. | {sentence} | {sentence}? | {noun} |
    {noun} {noun2} | {adjective} {noun}
    """
)
PLACES = words(
    """
    France Germany Spain Italy Portugal Poland Sweden Norway Finland Greece Turkey Egypt Kenya
    Ghana Nigeria India China Japan Korea Vietnam Thailand Brazil Chile Peru Mexico Canada
    Australia London Paris Berlin Rome Madrid Tokyo Cairo Moscow
    """
)


def write_greeting(rng: Random, split: Split) -> Thread:
    return _ask_from(rng, split, GREETINGS)


def write_identity(rng: Random, split: Split) -> Thread:
    return _ask_from(rng, split, IDENTITY)


def write_story(rng: Random, split: Split) -> Thread:
    """Ask for a story, with or without a given hero. Held out are wordings."""

    def sample(rng: Random) -> tuple[str, str]:
        if rng.random() < 0.2:
            return compose(rng, STORY_ASKED_OF_NOBODY), "fox"
        hero = rng.choice(HEROES)
        return compose(rng, STORY_ASKED, hero=article(hero)), hero

    question, hero = draw(rng, split, sample, lambda pair: wording_key(pair[0]))
    return (Exchange(question, STORY.format(hero=hero, a_hero=article(hero))),)


def write_refusal(rng: Random, split: Split) -> Thread:
    question = draw(rng, split, _beyond, lambda text: f"refusal {text}")
    return (Exchange(question, REFUSAL),)


def _ask_from(rng: Random, split: Split, answers: dict[str, tuple[str, ...]]) -> Thread:
    """Choose an answer and a question for it. Held out are wordings."""

    def sample(rng: Random) -> tuple[str, str]:
        answer = rng.choice(tuple(answers))
        return roughen(rng, rng.choice(answers[answer])), answer

    question, answer = draw(rng, split, sample, lambda pair: wording_key(pair[0]))
    return (Exchange(question, answer),)


def _beyond(rng: Random) -> str:
    return compose(
        rng,
        BEYOND,
        place=rng.choice(PLACES),
        noun=rng.choice(NOUNS),
        noun2=rng.choice(NOUNS),
        adjective=rng.choice(ADJECTIVES),
        verb=rng.choice(VERBS),
        sentence=sentence(rng),
        a=rng.randint(1, 99),
        b=rng.randint(1, 99),
        c=rng.randint(1, 99),
        large=rng.randint(100, 9999),
    )


GREETING = Skill("greeting", weight=0.8, write=write_greeting, thought="I greet the user.")
IDENTITY_SKILL = Skill("identity", weight=0.6, write=write_identity, thought="This is about me.")
STORIES = Skill("story", weight=0.25, write=write_story, thought="I tell a story.")
REFUSALS = Skill(
    "refusal", weight=0.7, write=write_refusal, thought="I do not know this.", tools=Tools.WITHOUT
)
