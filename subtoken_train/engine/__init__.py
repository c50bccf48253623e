"""The compressed pass: a backbone with reducer and routers, its rows, contexts and attention."""
