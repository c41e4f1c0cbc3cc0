"""The endpoints: parse a request, call one service, build the response. No rules, SQL or files here."""
