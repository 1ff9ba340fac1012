"""Media of requests: fetched, checked by their headers, and held until the request's end."""
