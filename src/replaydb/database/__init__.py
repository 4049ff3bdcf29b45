"""Everything that talks SQL: tables, statements, engines and the repository over them."""
