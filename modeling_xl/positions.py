"""The index of position schemes: name -> class. A new scheme is a new file and one import line here."""

from .position_alibi import AlibiPosition
from .position_base import PositionScheme
from .position_none import NoPosition
from .position_rope import RopePosition
from .position_t5 import T5Position
from .position_xl import XLPosition

POSITION_SCHEMES: dict[str, type[PositionScheme]] = {
    scheme.name: scheme for scheme in (XLPosition, T5Position, RopePosition, AlibiPosition, NoPosition)
}
