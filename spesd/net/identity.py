"""Who a peer is: an RSA key in libp2p's form, kept in a file that only its owner can read.

A peer id is the hash of the public key, so a signature proves who speaks. Never sends anything.
"""

import contextlib
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from hivemind.proto import crypto_pb2
from multihash import coerce_code, encode

from spesd.errors import ProtocolViolation, Unavailable

KEY_BITS = 2048
MAX_KEY_BYTES = 1024


class Identity:
    """A key pair and the peer id that follows from it."""

    def __init__(self, key: rsa.RSAPrivateKey) -> None:
        self._key = key
        self.public_key = _public_bytes(key.public_key())
        self.peer_id = peer_id_of(self.public_key)

    @classmethod
    def generate(cls) -> "Identity":
        """Make a new identity."""
        return cls(rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS))

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """Load the identity in `path`, or make one and keep it there with mode 0600.

        Raises Unavailable if the file is damaged or cannot be written.
        """
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            identity = cls.generate()
            identity.save(path)
            return identity
        except OSError as error:
            raise Unavailable(f"cannot read the key {path}: {error.strerror}.") from None
        try:
            private = crypto_pb2.PrivateKey.FromString(raw)
            key = serialization.load_der_private_key(private.data, password=None)
            if not isinstance(key, rsa.RSAPrivateKey):
                raise ValueError("not an RSA key")
        except Exception as error:  # noqa: BLE001 - the parsers raise what they like
            raise Unavailable(
                f"the key {path} is damaged ({type(error).__name__}); restore it from a backup, "
                "or move it away to join as a new peer."
            ) from None
        with contextlib.suppress(OSError):
            path.chmod(0o600)
        return cls(key)

    def save(self, path: Path) -> None:
        """Write the key so that it is there whole, with mode 0600, or not at all."""
        data = self._key.private_bytes(
            encoding=serialization.Encoding.DER,
            format=serialization.PrivateFormat.TraditionalOpenSSL,
            encryption_algorithm=serialization.NoEncryption(),
        )
        raw = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=data).SerializeToString()
        temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            temp.replace(path)
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        except OSError as error:
            raise Unavailable(f"cannot write the key {path}: {error.strerror}.") from None

    def sign(self, message: bytes) -> bytes:
        """Sign a message."""
        return self._key.sign(message, padding.PKCS1v15(), hashes.SHA256())


def peer_id_of(public_key: bytes) -> str:
    """Return the peer id of a public key in libp2p's form."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(public_key)
    return str(PeerID(encode(digest.finalize(), coerce_code("sha2-256"))))


def verify(public_key: bytes, message: bytes, signature: bytes) -> None:
    """Raise ProtocolViolation unless the holder of `public_key` signed `message`."""
    if len(public_key) > MAX_KEY_BYTES:
        raise ProtocolViolation("a public key is too large")
    try:
        data = crypto_pb2.PublicKey.FromString(public_key).data
        key = serialization.load_der_public_key(data)
    except Exception:  # noqa: BLE001 - the parsers raise what they like
        raise ProtocolViolation("a public key cannot be read") from None
    if not isinstance(key, rsa.RSAPublicKey) or not 2048 <= key.key_size <= 4096:
        raise ProtocolViolation("a public key is not RSA of 2048 to 4096 bits")
    try:
        key.verify(signature, message, padding.PKCS1v15(), hashes.SHA256())
    except InvalidSignature:
        raise ProtocolViolation("a signature does not fit its message") from None


def _public_bytes(key: rsa.RSAPublicKey) -> bytes:
    data = key.public_bytes(
        encoding=serialization.Encoding.DER,
        format=serialization.PublicFormat.SubjectPublicKeyInfo,
    )
    return bytes(
        crypto_pb2.PublicKey(key_type=crypto_pb2.KeyType.RSA, data=data).SerializeToString()
    )
