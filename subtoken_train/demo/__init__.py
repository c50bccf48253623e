"""A page in the browser that shows what compression does to an answer, its cache and its picture."""
