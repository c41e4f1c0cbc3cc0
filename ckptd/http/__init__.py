"""What HTTP needs beside the endpoints: access, limits, bodies, errors. No SQL."""
