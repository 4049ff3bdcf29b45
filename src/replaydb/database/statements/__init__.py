"""SQLAlchemy Core statements, one small function each. Values are bound, never written in.

Those of one table are in the file of its name; what reads groups in an order is in `pools` and
`pages`, what sums them up in `counts` and `statistics`.
"""
