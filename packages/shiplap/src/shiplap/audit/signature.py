"""An optional ed25519 signature of a passport or verdict, in a file beside it, which proves who issued the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shiplap import trust
from shiplap.errors import error

__all__ = ["SUFFIX", "is_signed_by", "sign"]

SUFFIX = ".sig"
KEY = 1 << 16  # bytes of a key or a signature


def sign(passport: Path, key: Path) -> Path:
    """Sign the bytes of ``passport`` with the private key in the PEM file ``key``; returns the signature's file."""
    serialization, ed25519 = _library()
    private = _read(key, lambda data: serialization.load_pem_private_key(data, password=None))
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise _refused(key, type(private).__name__, "an ed25519 private key in PEM")
    target = passport.with_name(passport.name + SUFFIX)
    trust.write_whole(target, f"{private.sign(passport.read_bytes()).hex()}\n".encode())
    return target


def is_signed_by(passport: Path, key: Path, content: bytes) -> bool:
    """Whether the signature beside ``passport``, of which ``content`` was read, is that of the public key in the PEM
    file ``key``.
    """
    serialization, ed25519 = _library()
    public = _read(key, serialization.load_pem_public_key)
    if not isinstance(public, ed25519.Ed25519PublicKey):
        raise _refused(key, type(public).__name__, "an ed25519 public key in PEM")
    from cryptography.exceptions import InvalidSignature

    try:
        written = trust.read_file(passport.with_name(passport.name + SUFFIX), KEY, trust.NAMED)
        public.verify(bytes.fromhex(written.decode()), content)
    except (OSError, ValueError, InvalidSignature):
        return False
    return True


def _library() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise error(
            "SL603",
            where="signatures",
            got="no cryptography",
            expected="the package cryptography",
            fix='install it: pip install "shiplap[sign]"',
        ) from None
    return serialization, ed25519


def _read(path: Path, load: Any) -> Any:
    try:
        return load(trust.read_file(path, KEY, trust.NAMED))
    except (OSError, ValueError, TypeError) as e:
        raise _refused(path, str(e), "a key in PEM") from None


def _refused(path: Path, got: str, expected: str) -> Exception:
    return error("SL602", where=str(path), what="the key cannot be used", got=got, expected=expected)
