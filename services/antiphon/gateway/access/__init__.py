"""Who may ask, and how much: keys, tenants, buckets. Knows neither HTTP nor the bus."""
