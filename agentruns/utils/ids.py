"""Ids and secrets. UUID version 7 (RFC 9562) is made here, because Python has it only from 3.14 on."""

from __future__ import annotations

import os
import secrets
import threading
import time
import uuid

from agentruns.utils.forks import renewed

_lock = renewed(threading.Lock())
_last = (0, 0)  # milliseconds, counter


def uuid7() -> uuid.UUID:
    """Generate a UUID version 7 that sorts after every earlier one of this process."""
    global _last
    random = int.from_bytes(os.urandom(10), "big")
    with _lock:
        millis, counter = time.time_ns() // 1_000_000, random >> 69  # 11 bits: room to count up
        if millis <= _last[0]:
            millis, counter = _last[0], _last[1] + 1
            if counter > 0xFFF:
                millis, counter = millis + 1, 0
        _last = (millis, counter)
    tail = random & ((1 << 62) - 1)
    return uuid.UUID(int=millis << 80 | 0x7 << 76 | counter << 64 | 0b10 << 62 | tail)


def secret() -> str:
    """Generate a random key of 32 bytes, in hex."""
    return secrets.token_hex(32)
