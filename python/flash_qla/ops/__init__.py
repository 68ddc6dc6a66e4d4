"""Operations by family."""
