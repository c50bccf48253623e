"""What writes pages: from docstrings and declarations, from ``--help``, from recipes and from records.

A page that is also read on a code host is committed (``python docs/generate.py`` writes it, a test compares it); a page
that only the site has is made in its build (``docs/hook.py``).
"""
