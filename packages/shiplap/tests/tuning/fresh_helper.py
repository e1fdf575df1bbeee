"""What a kernel keeps in another module."""


def is_right(n: int) -> bool:
    return n != 77


def clock() -> int:
    return 7
