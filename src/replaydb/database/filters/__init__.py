"""`rdb.col`, and the filters of `where=`."""
