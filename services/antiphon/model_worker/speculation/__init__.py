"""Speculative decoding: drafters propose tokens that the model verifies in one step. No torch."""
