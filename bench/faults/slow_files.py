#!/usr/bin/env python3
"""A file on slow storage: a FUSE file system with one read-only file, each page of which takes a while to read.

    bench/faults/slow_files.py FILE MOUNTPOINT MILLISECONDS

Needs /dev/fuse and the right to mount. Serves until it is killed; then unmount MOUNTPOINT. Reads are served one after
the other, as a disk does.
"""

import ctypes
import errno
import os
import stat
import struct
import sys
import time

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS = (
    1, 2, 3, 14, 15, 17, 18, 25, 26, 27, 28, 29, 34)
INTERRUPT, BATCH_FORGET = 36, 42
ROOT, FILE = 1, 2
SECONDS_VALID = 3600


def attributes(node, size):
    mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o444
    return struct.pack("<6Q10I", node, size, (size + 511) // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def mount(path, device):
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"slow", os.fsencode(path), b"fuse.slow", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"cannot mount {path}")


def answer(operation, node, body, file, name, delay):
    """The answer to a request: bytes, or an error number."""
    size = os.fstat(file).st_size
    if operation == INIT:
        # No readahead: every page is a request.
        return struct.pack("<4I2H2I2H8I", 7, 31, 0, 0, 16, 12, 4096, 1, 1, 0, *[0] * 8)
    if operation == LOOKUP:
        if body.rstrip(b"\0") != name:
            return errno.ENOENT
        return struct.pack("<4Q2I", FILE, 0, SECONDS_VALID, SECONDS_VALID, 0, 0) + attributes(FILE, size)
    if operation == GETATTR:
        return struct.pack("<Q2I", SECONDS_VALID, 0, 0) + attributes(node, 0 if node == ROOT else size)
    if operation in (OPEN, OPENDIR):
        return struct.pack("<Q2I", 0, 0, 0)
    if operation == READ:
        time.sleep(delay)
        _, offset, length = struct.unpack_from("<QQI", body)
        return os.pread(file, length, offset)
    if operation == STATFS:
        return bytes(80)
    if operation in (RELEASE, FLUSH, READDIR, RELEASEDIR, ACCESS):
        return b""
    return errno.ENOSYS


def main():
    path, mountpoint, delay = sys.argv[1], sys.argv[2], float(sys.argv[3]) / 1e3
    file, device = os.open(path, os.O_RDONLY), os.open("/dev/fuse", os.O_RDWR)
    mount(mountpoint, device)
    print("mounted", flush=True)
    while True:
        try:
            request = os.read(device, 1 << 17)
        except InterruptedError:
            continue
        except OSError:  # unmounted
            return
        _, operation, unique, node = struct.unpack_from("<2I2Q", request)
        if operation in (FORGET, BATCH_FORGET, INTERRUPT):
            continue
        found = answer(operation, node, request[40:], file, os.fsencode(os.path.basename(path)), delay)
        error, data = (-found, b"") if isinstance(found, int) else (0, found)
        os.write(device, struct.pack("<IiQ", 16 + len(data), error, unique) + data)


if __name__ == "__main__":
    main()
