"use strict";
SwaggerUIBundle({ url: "openapi.json", dom_id: "#ui", deepLinking: true });
