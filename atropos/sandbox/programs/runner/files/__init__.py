"""Operations on files: read, write, search, archives, and streams of their bytes."""
