"""HTTP infrastructure shared by the endpoints: access, limits, bodies, errors. No SQL."""
