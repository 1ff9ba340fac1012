"""One family of models a file, each a declaration that the registry names."""
