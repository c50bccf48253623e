"""Generation with reducer and routers active."""
