"""SGLang's native APIs: generation, control, and server information."""
