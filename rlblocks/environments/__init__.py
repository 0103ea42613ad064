"Episodes: a policy that talks to environments, tools and users, and the rows that they become."
