"""The index of memory mechanisms: name -> class. A new mechanism is a new file and one import line here."""

from .memory_base import MemoryMechanism
from .memory_compressive import Compressive
from .memory_linear import LinearAttention
from .memory_none import NoMemory
from .memory_recurrence import Recurrence

MEMORY_MECHANISMS: dict[str, type[MemoryMechanism]] = {
    mechanism.name: mechanism for mechanism in (NoMemory, Recurrence, Compressive, LinearAttention)
}
