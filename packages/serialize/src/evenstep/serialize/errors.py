"""The error for bytes that cannot be decoded."""


class DecodeError(ValueError):
    """Bytes are truncated, damaged or hostile; the message says where and which rule they break.

    The base is ``ValueError``, so code that treats a bad buffer as bad input needs no import.
    """
