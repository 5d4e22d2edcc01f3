"""Tables, figures and explanations of what was measured or received."""

from tersegrad.report.catalog import Entry, catalog, catalog_table
from tersegrad.report.inspection import Explanation, explain
from tersegrad.report.limits import bounds_at
from tersegrad.report.plain import as_json
from tersegrad.report.tables import Column, Table, parse_size, rate_table, speed_table

__all__ = [
    "Column",
    "Entry",
    "Explanation",
    "Table",
    "as_json",
    "bounds_at",
    "catalog",
    "catalog_table",
    "explain",
    "parse_size",
    "rate_table",
    "speed_table",
]
