"""How published weights travel: copied within a process, through shared memory, by broadcast, or pulled over TCP.

All are double-buffered: a publication stays readable while the next one is written, and is written over by the one
after that, which its checksums then show. Receivers always get copies of their own: nobody ever holds an alias.
"""

from relax_core.transports.broadcast import BroadcastTransport
from relax_core.transports.copy import CopyTransport
from relax_core.transports.shared import SharedTransport
from relax_core.transports.tcp import TcpTransport

__all__ = ["BroadcastTransport", "CopyTransport", "SharedTransport", "TcpTransport"]
