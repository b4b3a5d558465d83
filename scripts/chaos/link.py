"""A network link between two hosts that can be cut, delayed or made lossy.

The hosts are network namespaces with a TUN device each; a thread of this process carries the packets. It needs neither a
real root user (inside `unshare --map-root-user --net`) nor kernel modules for traffic control.
"""

import array
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time

TUNSETIFF = 0x400454CA
TUN_WITHOUT_HEADER = 0x1001
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def open_tun(address):
    """A TUN device in the namespace of this process."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"host", TUN_WITHOUT_HEADER))
    for command in (f"addr add {address}/24 dev host", "link set host up", "link set lo up"):
        subprocess.run(["ip", *command.split()], check=True)
    return tun


class Link:
    """Host 0 is the namespace of this process; host 1 is that of a child, see `command`."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.cut, self.delay, self.loss = False, 0.0, 0.0
        # Host 1 ends when this side is closed.
        self.lifeline, theirs = socket.socketpair()
        args = ["unshare", "--net", sys.executable, __file__, str(theirs.fileno())]
        self.host = subprocess.Popen(args, pass_fds=[theirs.fileno()])
        theirs.close()
        _, ancillary, _, _ = self.lifeline.recvmsg(1, socket.CMSG_SPACE(4))
        received = array.array("i")
        received.frombytes(ancillary[0][2])
        self.tuns = [open_tun(ADDRESSES[0]), received[0]]
        threading.Thread(target=self.carry, daemon=True).start()

    def command(self, node, args):
        """The command that runs `args` on a host."""
        return args if node == 0 else ["nsenter", f"--net=/proc/{self.host.pid}/ns/net", *args]

    def repair(self):
        self.cut, self.delay, self.loss = False, 0.0, 0.0

    def carry(self):
        waiting, count = [], 0  # (time, number, device, packet)
        while True:
            timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
            for tun in select.select(self.tuns, [], [], timeout)[0]:
                packet = os.read(tun, 65536)
                if self.cut or self.random.random() < self.loss:
                    continue
                count += 1
                other = self.tuns[1 - self.tuns.index(tun)]
                heapq.heappush(waiting, (time.monotonic() + self.delay, count, other, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, tun, packet = heapq.heappop(waiting)
                try:
                    os.write(tun, packet)
                except BlockingIOError:
                    pass  # A full queue drops packets, like a real one.


def main():
    """Host 1: passes its device to the parent and keeps the namespace alive."""
    parent = socket.socket(fileno=int(sys.argv[1]))
    tun = open_tun(ADDRESSES[1])
    parent.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [tun]))])
    parent.recv(1)  # Ends with the parent.


if __name__ == "__main__":
    main()
