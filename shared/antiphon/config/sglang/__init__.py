"""SGLang's arguments: names, values, aliases, and the reasons of those that are refused."""
