"""Authentication and quotas: keys, tenants, buckets. Independent of HTTP and of the bus."""
