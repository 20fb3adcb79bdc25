"""The rows of the table, in the order in which they are measured."""

from rows import batches, cold, warm, writing

ROWS = {
    "big": warm.big,
    "folios": warm.folios,
    "states": warm.states,
    "again": warm.again,
    "seq8m": warm.seq8m,
    "seq64m": warm.seq64m,
    "par16": warm.par16,
    "small": warm.small,
    "beside": warm.beside,
    "busy": warm.busy,
    "first": warm.first,
    "host": warm.host,
    "owner": warm.owner,
    "mix": cold.mix,
    "cold-small": cold.cold_small,
    "cold-par": cold.cold_par,
    "cold": cold.cold,
    "writes": writing.writes,
    "batch": batches.batch,
    "hold": batches.hold,
}
