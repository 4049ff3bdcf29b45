"""What an operator does with a whole store.

copy    a store made again in another database, on another engine, with payloads elsewhere
verify  every payload, row and account looked at; accounts repaired
vacuum  space given back to the system
"""

from replaydb.operations.copy import CopyReport, copy
from replaydb.operations.vacuum import VacuumReport, vacuum
from replaydb.operations.verify import Problem, VerifyReport, verify
from replaydb.publishing import publish

__all__ = [
    "CopyReport",
    "Problem",
    "VacuumReport",
    "VerifyReport",
    "copy",
    "vacuum",
    "verify",
]

publish(__name__, __all__)
del publish
