"""CPU kernels in C++, built once per installation; without them the torch references run."""
