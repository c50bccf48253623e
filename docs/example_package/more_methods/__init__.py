"""One of each kind of method that a package of yours can bring to subtoken_train."""
