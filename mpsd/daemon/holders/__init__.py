"""The holders of leases: processes and control groups, identified with certainty and watched until they are gone."""
