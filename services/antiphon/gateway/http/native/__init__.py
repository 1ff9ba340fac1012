"""SGLang's own APIs: generation, control, and what a server says of itself."""
