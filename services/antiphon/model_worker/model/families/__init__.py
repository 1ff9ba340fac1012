"""Model families, one a module; each is a declaration that the registry lists."""
