"""Integers and texts as bytes, and a reader that believes no length before it has checked it."""

from evenstep.serialize.errors import DecodeError

_VARINT_LIMIT = 1 << 63  # nine groups of seven bits


def write_varint(out: bytearray, value: int) -> None:
    """Append ``value`` as a little-endian base-128 varint of the fewest bytes.

    Seven bits per byte, least significant first, the high bit set on all but the last byte.
    """
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def write_text(out: bytearray, text: str) -> None:
    """Append the length of ``text`` in UTF-8 bytes as a varint, then the bytes.

    Raises:
        UnicodeEncodeError: If ``text`` has a lone surrogate.
    """
    data = text.encode()
    write_varint(out, len(data))
    out += data


class Reader:
    """Reads from ``data`` step by step; each step checks what remains.

    Args:
        data: What to read.
        what: The name of the whole, for messages.
    """

    __slots__ = ("_data", "_end", "_what", "position")

    def __init__(self, data: bytes, what: str) -> None:
        self._data = data
        self._end = len(data)
        self._what = what
        self.position = 0

    @property
    def remaining(self) -> int:
        """Bytes not yet read."""
        return self._end - self.position

    def error(self, message: str) -> DecodeError:
        """Return the error that says ``message`` about the current position."""
        return DecodeError(f"{self._what}, byte {self.position}: {message}")

    def byte(self) -> int:
        """Read one byte."""
        if self.position >= self._end:
            raise self.error("ends early, one more byte expected")
        value = self._data[self.position]
        self.position += 1
        return value

    def varint(self) -> int:
        """Read a varint below 2**63; a longer form than needed is refused."""
        value, shift = 0, 0
        for position in range(self.position, self._end):
            group = self._data[position]
            value |= (group & 0x7F) << shift
            self.position = position + 1
            if value >= _VARINT_LIMIT:
                raise self.error("varint is 2**63 or more")
            if group < 0x80:
                if shift and not group:
                    raise self.error("varint has a superfluous last byte")
                return value
            shift += 7
        raise self.error("ends early, one more byte expected")

    def count(self, least_nbytes: int, limit: int, noun: str) -> int:
        """Read how many items follow, each of which takes at least ``least_nbytes``."""
        value = self.varint()
        if value > limit:
            raise self.error(f"{value} {noun} declared, at most {limit} are allowed")
        if value * least_nbytes > self.remaining:
            raise self.error(f"{value} {noun} declared, {self.remaining} bytes remain")
        return value

    def take(self, nbytes: int) -> bytes:
        """Read ``nbytes`` bytes."""
        if nbytes > self.remaining:
            raise self.error(f"{nbytes} bytes declared, {self.remaining} remain")
        start = self.position
        self.position += nbytes
        return self._data[start : self.position]

    def text(self, limit: int | None = None) -> str:
        """Read a text written by :func:`write_text`, of at most ``limit`` bytes."""
        nbytes = self.varint()
        if limit is not None and nbytes > limit:
            raise self.error(f"text of {nbytes} bytes declared, at most {limit} are allowed")
        data = self.take(nbytes)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"text is not UTF-8 ({error.reason})") from None

    def finish(self) -> None:
        """Check that everything was read."""
        if self.remaining:
            raise self.error(f"{self.remaining} bytes too many")
