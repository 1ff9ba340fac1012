"""Parts that only tests use: a clock that is moved by hand, and a broker of their own."""
