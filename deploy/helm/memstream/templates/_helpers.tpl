{{- define "memstream.selector" -}}
app.kubernetes.io/name: memstream
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "memstream.labels" -}}
{{ include "memstream.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Of every object. 52: a StatefulSet's pods have it in a label, with a hash. */}}
{{- define "memstream.name" -}}
{{- .Release.Name | replace "." "-" | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- /* The name by which servers verify each other's certificates, and clients the server's. */}}
{{- define "memstream.host" -}}
{{- printf "%s.%s.svc" (include "memstream.name" .) .Release.Namespace }}
{{- end }}

{{- define "memstream.replicas" -}}
{{- if eq .Values.mode "single" }}1{{ else }}{{ .Values.replicas | default 3 }}{{ end }}
{{- end }}

{{- define "memstream.appProtocol" -}}
{{- .Values.service.appProtocol | default (ternary "https" "grpc" .Values.tls.enabled) }}
{{- end }}

{{- /*
A value as the text of an environment variable, quoted. Numbers are written in full: text and `quote` write a million as
1e+06, which is no integer to the server. A $ is doubled, as Kubernetes replaces $(NAME), and $$ by $.
*/}}
{{- define "memstream.value" -}}
{{- $text := kindIs "string" . | ternary . (toJson .) }}
{{- $text | replace "$" "$$" | toJson }}
{{- end }}

{{- define "memstream.variable" -}}
- name: MEMSTREAM_{{ upper (index . 0) }}
  value: {{ include "memstream.value" (index . 1) }}
{{- end }}

{{- define "memstream.secretVariable" -}}
- name: MEMSTREAM_{{ upper (index . 0) }}
  valueFrom:
    secretKeyRef:
      name: {{ index . 1 }}
      key: {{ index . 2 }}
{{- end }}

{{- /* "true" where a file of the values ({inline, existingSecret, existingConfigMap, key}) is given. */}}
{{- define "memstream.given" -}}
{{- if or .inline .existingSecret .existingConfigMap }}true{{ end }}
{{- end }}

{{- /* Objects that the chart makes unless they are named. */}}
{{- define "memstream.tlsSecret" -}}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "memstream.name" .)) }}
{{- end }}
{{- define "memstream.accessSecret" -}}
{{- printf "%s-access" (include "memstream.name" .) }}
{{- end }}
{{- define "memstream.storesSecret" -}}
{{- printf "%s-stores" (include "memstream.name" .) }}
{{- end }}
{{- define "memstream.files" -}}
{{- printf "%s-files" (include "memstream.name" .) }}
{{- end }}

{{- /* "true" where this release has such a thing. */}}
{{- define "memstream.makesTls" -}}
{{- if and .Values.tls.enabled (not .Values.tls.existingSecret) }}true{{ end }}
{{- end }}
{{- define "memstream.makesKey" -}}
{{- if and .Values.access.enabled .Values.access.apiKeys.enabled (not .Values.access.apiKeys.existingSecret) }}true{{ end }}
{{- end }}
{{- define "memstream.sharesDatabase" -}}
{{- if and (or .Values.journal.url .Values.journal.existingSecret) .Values.access.enabled }}true{{ end }}
{{- end }}
{{- define "memstream.makesPeerSecret" -}}
{{- if and (include "memstream.sharesDatabase" .) (not .Values.peerSecret.existingSecret) }}true{{ end }}
{{- end }}
{{- define "memstream.hasJwks" -}}
{{- if or .Values.access.jwt.jwks.url (include "memstream.given" .Values.access.jwt.jwks) }}true{{ end }}
{{- end }}
