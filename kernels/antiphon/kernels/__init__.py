"""Operations on tensors: each is its torch reference, with faster backends attached as rows."""
