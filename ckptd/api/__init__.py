"""HTTP only: parse a request, call one service, shape the answer. No rules, no SQL, no files."""
